"""The client side: connections to brokers and name servers, for trio and asyncio."""
