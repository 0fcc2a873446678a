// Package body reads request bodies that nobody has to trust: never more than
// a limit, never longer than a client keeps sending. Answers are written for no
// longer than a client keeps taking them.
//
// Patient and PatientWriter are what every front puts between the connection
// and itself; TooLarge and Stalled are the one wording of the two refusals. Read
// is all of it for a front that wants the whole body as bytes.
//
// A reader and a writer belong to one request. Errors of reading are
// *fault.Fault.
package body
