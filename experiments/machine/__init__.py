"""The machine: its devices, several processes, signals, and where the time goes."""
