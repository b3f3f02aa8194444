"""Memory and time of a run, predicted from the models' configs before anything loads."""
