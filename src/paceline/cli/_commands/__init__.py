"""Commands of the command line, one file for each subject."""
