"""Tests of the library: python -m unittest discover -t sdk/python -s sdk/python/tests."""
