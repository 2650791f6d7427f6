"""Subcommands of `kvtape` about trace files; one module per command, imported only when it is called."""
