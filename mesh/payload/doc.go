// Package payload is what requests carry: named parts, each a blob or a
// tensor, and typed parameters. It converts them from and to the contract's
// messages, and checks bytes from outside: names, datatypes, and that shapes
// and raw bytes agree. It says what media types mean, too.
//
// Parts share their bytes with the message they came from; treat them as
// read-only. Values are immutable.
package payload
