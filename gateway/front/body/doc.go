// Package body reads request bodies that nobody has to trust: never more than
// a limit, never longer than a client keeps sending. Answers are written for no
// longer than a client keeps taking them.
//
// Patient and PatientWriter are what every front puts between the connection
// and itself; TooLarge and Stalled are the one wording of the two refusals. Read
// is all of it for a front that wants the whole body as bytes.
//
// Budgeted books bodies in the budget of all requests together. Inputs that are not in
// a body as they are, and may be larger than it, are made in a Room.
//
// A reader, a writer and a room belong to one request. Errors are *fault.Fault.
package body
