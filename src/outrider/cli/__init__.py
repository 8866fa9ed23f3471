"""The command line: one thin file per verb. It decides nothing that the library could decide."""
