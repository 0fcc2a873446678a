// Package envelope is the message on a stage's subject and the reply to it:
// identity, route, deadline, trace, timeline, payload. Encode writes them;
// Decode reads bytes from anywhere and checks everything that the mesh relies
// on, so what it returns can be trusted to be well formed, though not to be
// honest.
//
// The bytes are those of the messages in envelope.proto. Envelopes, replies and
// results, which every request pays for at every hop, are read and written
// straight, by mesh/wire; what is rare, such as claims, dead letters and the
// faults in replies, goes by way of the generated messages. Tests hold both ways
// against each other. What they take of a sender is the same: fields in any
// order, the last of what is there twice, merged where protobuf merges.
//
// Envelopes and replies are plain values. The payload of a decoded envelope,
// reply or result is the bytes that it was read from, which are given away with
// that: they must not be written to, nor read into again. The bus keeps to
// that, for the NATS client makes new memory for each message. All else is copied.
// The texts of one message share memory, so a name that is kept for long, and no
// more of its message, is worth a strings.Clone.
package envelope
