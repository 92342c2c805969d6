"""Messages to people: rules, channels, and the thread that sends."""
