//! A disk in memory that fails on demand and can be cut at any operation: the adversary of the crash tests.
