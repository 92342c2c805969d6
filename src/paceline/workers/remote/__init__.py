"""Workers on other nodes: their hosts, their sockets, their files, and the Ray cluster."""
