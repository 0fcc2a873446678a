// Package frame is the codec of the worker protocol, sdk/PROTOCOL.md, which a
// stage's host and its workers use on a Unix socket.
//
//	m, body, err := frame.Read(r, maxBody)     // a message, and the bytes that it points into
//	x, err := part.Tensor(body)                // of one of its parts, without a copy
//
//	var b frame.Body                           // lays parts out
//	part := b.Tensor("x", -1, x)
//	err = frame.Write(w, m, &b)
//
// Read takes exactly one frame off the reader. It reads a body only after it has
// checked the header that points into it. It allocates at most a constant multiple
// of the bytes that arrived, plus a mebibyte: a length alone allocates nothing.
// Pass a *bufio.Reader, because Read reads a frame in three pieces.
//
// An error that wraps ErrViolation means that the peer breaks the protocol; nothing
// more can be read from that connection. Other errors are the reader's. Read returns
// io.EOF only between frames.
//
// Write and Encode refuse every message that Read would refuse. A header that is too
// long is ErrHeaderSize; the same batch in halves may fit. Encode and Body.Buffers are
// Write in two steps, for callers that distinguish a message that cannot be encoded from
// a peer that is gone.
//
// A message holds the values of its header; empty lists are nil. The bytes of parts
// stay in the body that Read returned, which the caller owns.
//
// Read and Write keep no state. They are safe for concurrent use on different
// connections, and on the two directions of one connection. Two writers of one
// connection must take turns.
//
// sdk/vectors has frames as bytes; the tests of this package write and check them.
package frame

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"unicode/utf8"
)

// Version is the version of the protocol in hello and welcome.
const Version = 1

// Bounds of a frame.
const (
	// MaxHeader is the longest header, in bytes.
	MaxHeader = 1 << 20
	// Alignment is the alignment of a part's bytes in the body, in bytes.
	Alignment = 64
	// MaxItems is the most items of a batch, MaxSlots the most batches that a worker
	// runs at a time.
	MaxItems = 1 << 16
	MaxSlots = 1 << 10

	minHeader  = len("{}")
	prefixSize = 16
	// firstRead bounds the allocation for a length before its bytes arrive.
	firstRead = 1 << 20
	// firstHeader is the initial capacity of an encoded frame, in bytes.
	firstHeader = 512
	// maxNumber is the largest number that every JSON library keeps.
	maxNumber int64 = 1<<53 - 1
	// maxCount bounds rows, versions, process ids and the like.
	maxCount = 1<<31 - 1
	// maxDepth bounds the nesting of a header's JSON.
	maxDepth = 64
)

// magic begins every frame.
var magic = [4]byte{'S', 'M', 'W', '1'}

var (
	// ErrViolation means that a peer breaks the protocol.
	ErrViolation = errors.New("worker protocol violation")
	// ErrHeaderSize means that a message does not fit a header.
	ErrHeaderSize = errors.New("the header is too long")
)

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrViolation, fmt.Errorf(format, args...))
}

// Read returns the next message and its body, of at most maxBody bytes.
func Read(r io.Reader, maxBody int64) (Message, []byte, error) {
	var prefix [prefixSize]byte
	if n, err := io.ReadFull(r, prefix[:]); err != nil {
		if n > 0 {
			err = unexpectedEOF(err)
		}
		return nil, nil, err
	}
	header, size, err := sizes(prefix, maxBody)
	if err != nil {
		return nil, nil, err
	}
	text, err := readBytes(r, header)
	if err != nil {
		return nil, nil, err
	}
	m, err := decode(text, size)
	if err != nil {
		return nil, nil, err
	}
	body, err := readBytes(r, size)
	if err != nil {
		return nil, nil, err
	}
	return m, body, nil
}

// sizes checks the first bytes of a frame and returns the lengths of its header and
// its body.
func sizes(prefix [prefixSize]byte, maxBody int64) (header, body int64, err error) {
	if !bytes.Equal(prefix[:len(magic)], magic[:]) {
		return 0, 0, violation("a frame begins with % x, not % x", prefix[:len(magic)], magic[:])
	}
	header = int64(binary.LittleEndian.Uint32(prefix[4:]))
	if header < int64(minHeader) || header > MaxHeader {
		return 0, 0, violation("a header of %d bytes; %d to %d are allowed", header, minHeader, MaxHeader)
	}
	length := binary.LittleEndian.Uint64(prefix[8:])
	if length > uint64(max(0, maxBody)) {
		return 0, 0, violation("a body of %d bytes; at most %d are allowed", length, max(0, maxBody))
	}
	return header, int64(length), nil
}

// readBytes reads exactly n bytes, and allocates as they arrive.
func readBytes(r io.Reader, n int64) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	buf := make([]byte, min(n, firstRead))
	for have := int64(0); ; {
		if _, err := io.ReadFull(r, buf[have:]); err != nil {
			return nil, unexpectedEOF(err)
		}
		if have = int64(len(buf)); have == n {
			return buf, nil
		}
		grown := make([]byte, min(n, 2*have))
		copy(grown, buf)
		buf = grown
	}
}

// unexpectedEOF replaces io.EOF, which means an end between two frames.
func unexpectedEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Decode reads a header without checking its places against a body. Its errors wrap
// ErrViolation.
func Decode(header []byte) (Message, error) { return decode(header, math.MaxInt64) }

func decode(header []byte, body int64) (Message, error) {
	if !utf8.Valid(header) {
		return nil, violation("header: must be UTF-8")
	}
	c := coder{input: string(header)}
	kind := c.readType()
	if err := c.failure(); err != nil {
		return nil, violation("header: %w", err)
	}
	newMessage := messages[kind]
	if newMessage == nil {
		return nil, violation("header: type %q is not known", clip(kind))
	}
	m := newMessage()
	c = coder{input: c.input}
	c.object(m)
	c.end()
	if err := c.failure(); err != nil {
		return nil, violation("%s: %w", kind, err)
	}
	if err := check(m, body); err != nil {
		return nil, violation("%s: %w", kind, err)
	}
	return m, nil
}

// Write writes one frame. The body has the bytes of the message's parts; it is nil
// for a message without parts. Its bytes are not copied on the way to a connection
// of package net.
func Write(w io.Writer, m Message, body *Body) error {
	head, err := Encode(m, body.Len())
	if err != nil {
		return err
	}
	buffers := body.Buffers(head)
	_, err = buffers.WriteTo(w)
	return err
}

// Encode returns the bytes of a frame up to its body, whose length is body.
func Encode(m Message, body int64) ([]byte, error) {
	if err := check(m, body); err != nil {
		return nil, fmt.Errorf("%s: %w", m.kind(), err)
	}
	c := coder{writing: true, kind: m.kind(), buf: make([]byte, prefixSize, firstHeader)}
	c.object(m)
	if err := c.failure(); err != nil {
		return nil, fmt.Errorf("%s: %w", m.kind(), err)
	}
	size := len(c.buf) - prefixSize
	if size > MaxHeader {
		return nil, fmt.Errorf("%s: %w: %d bytes, at most %d are allowed", m.kind(), ErrHeaderSize, size, MaxHeader)
	}
	copy(c.buf, magic[:])
	binary.LittleEndian.PutUint32(c.buf[4:], uint32(size))
	binary.LittleEndian.PutUint64(c.buf[8:], uint64(body))
	return c.buf, nil
}
