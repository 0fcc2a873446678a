// Package frame is the codec of the worker protocol, sdk/PROTOCOL.md: what a
// stage's host and its workers say to each other over a Unix socket.
//
//	m, body, err := frame.Read(r, maxBody)     // a message, and the bytes that it points into
//	x, err := part.Tensor(body)                // of one of its parts, without a copy
//
//	var b frame.Body                           // lays parts out
//	part := b.Tensor("x", -1, x)
//	err = frame.Write(w, m, &b)
//
// Read takes exactly one frame off the reader, and reads a body only after it has
// checked the header that points into it. What it allocates is bounded by what
// came, times a constant, and a mebibyte: lengths alone buy nothing. Give it a
// *bufio.Reader: it reads a frame in three pieces.
//
// An error that wraps ErrViolation says that the peer does not keep to the
// protocol: nothing more can be read of that connection. Other errors are the
// reader's; io.EOF is only returned between frames.
//
// Write and Encode refuse what Read would. A header that is too long is
// ErrHeaderSize: the same batch in halves may do. Encode and Send are Write in two
// steps, for those who have to tell a message that cannot be sent from a peer that
// is gone.
//
// Messages hold what the header says, and lists that are empty are nil. The bytes
// of parts stay in the body that Read returned, which is the caller's.
//
// Read and Write keep nothing, so they are safe for concurrent use on different
// connections, or on the two directions of one. Two that write on one connection
// have to take turns.
//
// sdk/vectors has frames as bytes, which this package's tests write and hold it
// against.
package frame
