// Package envelope is the message on a stage's subject and the reply to it:
// identity, route, deadline, trace, timeline, payload. Encode writes them;
// Decode reads bytes from anywhere and checks everything that the mesh relies
// on, so what it returns can be trusted to be well formed, though not to be
// honest.
//
// Envelopes and replies are plain values. A decoded one shares its payload's
// bytes with the protobuf message it came from, not with the input.
package envelope
