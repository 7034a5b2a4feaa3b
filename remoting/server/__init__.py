"""The server side: the reactor, its connections, the gate and the routes."""
