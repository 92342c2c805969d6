"""Messages to people: rules, channels, sending."""
