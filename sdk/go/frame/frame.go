// Package frame is the codec of the worker protocol, sdk/PROTOCOL.md: what a
// stage's host and its workers say to each other over a Unix socket.
//
//	m, body, err := frame.Read(r, limits)      // a message, and the bytes it points into
//	err = frame.Write(w, m, body)              // Body lays parts out
//
// Read takes exactly one frame off the reader and makes room for no more than
// the limits, and for a large body only as it comes. An error that wraps
// ErrViolation says that the peer does not keep to the protocol: nothing more can
// be read of that connection. Other errors are the reader's; io.EOF is only
// returned between frames.
//
// Read and Write keep nothing, so they are safe for concurrent use on different
// connections, or on the two directions of one.
package frame

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
)

// Version is the protocol's, as hello and welcome say it.
const Version = 1

// Bounds of a frame, in bytes.
const (
	// MaxHeader is the longest header.
	MaxHeader = 1 << 20
	// Alignment is where a part's bytes begin: at a multiple of it.
	Alignment = 64

	prefixSize = 16
	// firstRead bounds what is allocated on the word of a length alone.
	firstRead = 1 << 20
)

// magic begins every frame.
var magic = [4]byte{'S', 'M', 'W', '1'}

// ErrViolation says that a peer does not keep to the protocol.
var ErrViolation = errors.New("worker protocol violation")

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrViolation, fmt.Errorf(format, args...))
}

// Read returns the next message and its body, of at most maxBody bytes.
func Read(r io.Reader, maxBody int64) (Message, []byte, error) {
	var prefix [prefixSize]byte
	if n, err := io.ReadFull(r, prefix[:]); err != nil {
		return nil, nil, torn(err, n == 0)
	}
	header, body, err := sizes(prefix, maxBody)
	if err != nil {
		return nil, nil, err
	}
	text, err := readBytes(r, header)
	if err != nil {
		return nil, nil, torn(err, false)
	}
	data, err := readBytes(r, body)
	if err != nil {
		return nil, nil, torn(err, false)
	}
	m, err := Decode(text)
	if err != nil {
		return nil, nil, err
	}
	return m, data, nil
}

// sizes checks the first bytes of a frame.
func sizes(prefix [prefixSize]byte, maxBody int64) (header, body int64, err error) {
	if !bytes.Equal(prefix[:len(magic)], magic[:]) {
		return 0, 0, violation("a frame begins with % x, not % x", prefix[:len(magic)], magic)
	}
	header = int64(binary.LittleEndian.Uint32(prefix[4:]))
	if header < 2 || header > MaxHeader {
		return 0, 0, violation("a header of %d bytes; 2 to %d are allowed", header, MaxHeader)
	}
	length := binary.LittleEndian.Uint64(prefix[8:])
	if length > uint64(max(0, maxBody)) {
		return 0, 0, violation("a body of %d bytes; at most %d are allowed", length, maxBody)
	}
	return header, int64(length), nil
}

// readBytes reads exactly n bytes, and makes room for them as they come.
func readBytes(r io.Reader, n int64) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	buf := make([]byte, min(n, firstRead))
	for have := int64(0); ; {
		if _, err := io.ReadFull(r, buf[have:]); err != nil {
			return nil, err
		}
		if have = int64(len(buf)); have == n {
			return buf, nil
		}
		grown := make([]byte, min(n, 2*have))
		copy(grown, buf)
		buf = grown
	}
}

// torn keeps io.EOF for the place between two frames.
func torn(err error, between bool) error {
	if !between && errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Write writes one frame. The body is that of the message's parts, nil where it
// has none; its bytes are not copied on the way to a connection of package net.
func Write(w io.Writer, m Message, body *Body) error {
	head, err := Encode(m, body.Len())
	if err != nil {
		return err
	}
	pieces := net.Buffers{head}
	if body != nil {
		pieces = append(pieces, body.pieces...)
	}
	_, err = pieces.WriteTo(w)
	return err
}

// Encode returns the bytes of a frame up to its body.
func Encode(m Message, body int64) ([]byte, error) {
	text, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.kind(), err)
	}
	head := make([]byte, prefixSize, prefixSize+len(text)+32)
	head = append(append(append(head, `{"type":"`...), m.kind()...), '"')
	if len(text) > len("{}") {
		head = append(head, ',')
	}
	head = append(head, text[1:]...)
	size := len(head) - prefixSize
	if size > MaxHeader {
		return nil, fmt.Errorf("%s: a header of %d bytes, at most %d are allowed", m.kind(), size, MaxHeader)
	}
	copy(head, magic[:])
	binary.LittleEndian.PutUint32(head[4:], uint32(size))
	binary.LittleEndian.PutUint64(head[8:], uint64(body))
	return head, nil
}
