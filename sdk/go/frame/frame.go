package frame

import (
	"bytes"
	"encoding/binary"
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

	minHeader  = len("{}")
	prefixSize = 16
	// firstRead bounds what is allocated on the word of a length alone.
	firstRead = 1 << 20
)

// magic begins every frame.
var magic = [4]byte{'S', 'M', 'W', '1'}

// ErrHeaderSize says that a message does not fit a header.
var ErrHeaderSize = errors.New("the header is too long")

// Read returns the next message and its body, of at most maxBody bytes.
func Read(r io.Reader, maxBody int64) (Message, []byte, error) {
	var prefix [prefixSize]byte
	if n, err := io.ReadFull(r, prefix[:]); err != nil {
		return nil, nil, torn(err, n == 0)
	}
	header, size, err := sizes(prefix, maxBody)
	if err != nil {
		return nil, nil, err
	}
	text, err := readBytes(r, header)
	if err != nil {
		return nil, nil, torn(err, false)
	}
	m, err := decode(text, size)
	if err != nil {
		return nil, nil, err
	}
	body, err := readBytes(r, size)
	if err != nil {
		return nil, nil, torn(err, false)
	}
	return m, body, nil
}

// sizes checks the first bytes of a frame.
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
	return Send(w, head, body)
}

// Send writes a frame whose head Encode has returned.
func Send(w io.Writer, head []byte, body *Body) error {
	pieces := net.Buffers{head}
	if body != nil {
		pieces = append(pieces, body.pieces...)
	}
	_, err := pieces.WriteTo(w)
	return err
}

// Encode returns the bytes of a frame up to its body, of which it has the length.
func Encode(m Message, body int64) ([]byte, error) {
	if err := m.check(body); err != nil {
		return nil, fmt.Errorf("%s: %w", m.kind(), err)
	}
	w := writer{buf: make([]byte, prefixSize, firstHeader)}
	w.open('{')
	w.text("type", m.kind())
	m.write(&w)
	w.close('}')
	if w.err != nil {
		return nil, fmt.Errorf("%s: %w", m.kind(), w.err)
	}
	size := len(w.buf) - prefixSize
	if size > MaxHeader {
		return nil, fmt.Errorf("%s: %w: %d bytes, at most %d are allowed", m.kind(), ErrHeaderSize, size, MaxHeader)
	}
	copy(w.buf, magic[:])
	binary.LittleEndian.PutUint32(w.buf[4:], uint32(size))
	binary.LittleEndian.PutUint64(w.buf[8:], uint64(body))
	return w.buf, nil
}

// firstHeader is the room that a frame's head begins with.
const firstHeader = 512
