"""Tests of the tier in a bucket."""
