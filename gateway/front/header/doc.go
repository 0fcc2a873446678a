// Package header is the headers that every front speaks: the request's id, the
// W3C trace context, and the reply's timeline as Server-Timing; and what lists such
// as Accept say.
//
// The functions are pure and safe for concurrent use. None fails: what a
// caller sent that is no trace context is left out, as W3C asks.
package header
