// Package payload is what requests carry: named parts, each a blob or a
// tensor, and typed parameters. It converts them from and to the contract's
// messages, or reads and writes their bytes on the wire, and checks what comes
// from outside: names, datatypes, and that shapes and raw bytes agree. It also
// interprets media types.
//
// FromProto and ToProto convert the generated messages; Code reads and writes what
// travels between stages, and accepts and rejects the same.
//
// Parts share their bytes with the message they came from, or with the bytes
// that they were read from; treat them as read-only. Values are immutable.
package payload
