// Package payload is what requests carry: named parts, each a blob or a
// tensor, and typed parameters. It converts them from and to the contract's
// messages, or reads and writes their bytes on the wire, and checks what comes
// from outside: names, datatypes, and that shapes and raw bytes agree. It says
// what media types mean, too.
//
// FromProto and ToProto are for what speaks the contract anyhow; what travels
// between stages is read by PartReader and ParameterReader and written by Write,
// which take the same and refuse the same.
//
// Parts share their bytes with the message they came from, or with the bytes
// that they were read from; treat them as read-only. Values are immutable.
package payload
