"""The broker's metrics for Prometheus. Imported only if metrics are enabled."""
