"""Routes for the clients of other trackers, which log here unchanged."""
