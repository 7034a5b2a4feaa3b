"""Configuration: property files, options, environment, command line."""
