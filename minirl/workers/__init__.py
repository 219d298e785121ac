"""Users' code in processes: a pool of them, the program that they run, and what an adapter gives to it."""
