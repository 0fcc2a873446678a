// Package fault is the vocabulary of failure: every failure that can reach a
// caller has a Reason, and one table has for each reason the gRPC code and
// HTTP status it is and whether a retry can help. docs/faults.md is that table
// in prose and is held against it by a test.
//
// A failure is classified once, where it is known, by New; everything else
// passes it on, and From recovers it from an error chain. What is not a Fault
// is INTERNAL: its text stays in the logs and does not reach the caller.
//
// Faults are plain values, safe to share once built. The With methods return
// copies.
package fault
