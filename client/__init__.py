"""The SDK: producers, consumers and administration, on anyio, so that it serves trio and asyncio programs alike."""
