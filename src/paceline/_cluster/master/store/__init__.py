"""The master's memory: tables, metrics in columns, and log files."""
