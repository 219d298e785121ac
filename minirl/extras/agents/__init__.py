"""Programs and environments that were not written for minirl. Other runs import nothing here."""
