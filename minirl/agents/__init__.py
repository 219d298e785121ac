"""Annex: programs and environments that were not written for minirl. A run that uses none imports nothing here."""
