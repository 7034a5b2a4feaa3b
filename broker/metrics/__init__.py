"""What a broker tells Prometheus. Imported only where metrics are on."""
