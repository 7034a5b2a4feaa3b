"""Master and slaves: copies of the commit log on other machines."""
