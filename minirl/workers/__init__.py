"""Users' code in processes: the pool, the program of a process, and the interface of its adapters."""
