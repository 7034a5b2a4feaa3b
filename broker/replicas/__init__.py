"""Controller mode: controllers assign the roles of the brokers of one name."""
