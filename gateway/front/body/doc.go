// Package body reads request bodies that nobody has to trust: never more than
// a limit, never longer than a client keeps sending.
//
// Patient is the reader that every front puts between the connection and
// itself; TooLarge and Stalled are the one wording of the two refusals. Read is
// all of it for a front that wants the whole body as bytes.
//
// A reader belongs to one request. Errors are *fault.Fault.
package body
