"""KV blocks between two servers: the wire format, the connection, and both of its ends."""
