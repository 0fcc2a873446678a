package procedure

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"time"

	"github.com/stagemesh/stagemesh/gateway/front/body"
)

// messages is a body of any number of messages, each behind its prefix. A caller
// may be silent between two of them for as long as its stream lasts, and has to
// keep sending within one.
type messages struct {
	io.Closer

	// from is the body, and patient the same with patience.
	from, patient io.Reader
	patience      time.Duration
	limit         int64
	// next is called before each message: what was read is in other hands.
	next func()

	prefix [prefixSize]byte
	// unread is what of the prefix was checked and not yet given, and left what
	// of the message was not yet read, in bytes.
	unread []byte
	left   int64
}

// Read implements io.Reader. A prefix is read whole and checked before any of it
// is given.
func (m *messages) Read(buf []byte) (int, error) {
	if len(m.unread) == 0 && m.left == 0 {
		if err := m.readPrefix(); err != nil {
			return 0, err
		}
	}
	if len(m.unread) > 0 {
		n := copy(buf, m.unread)
		m.unread = m.unread[n:]
		return n, nil
	}
	n, err := m.within(buf[:min(int64(len(buf)), m.left)])
	m.left -= int64(n)
	return n, err
}

func (m *messages) readPrefix() error {
	m.next()
	if _, err := io.ReadFull(m.from, m.prefix[:1]); err != nil {
		return m.failure(err)
	}
	for read := 1; read < prefixSize; {
		n, err := m.within(m.prefix[read:])
		if read += n; err != nil && read < prefixSize {
			return torn(err)
		}
	}
	m.left = int64(binary.BigEndian.Uint32(m.prefix[1:]))
	if m.left > m.limit {
		return Failure(body.TooLarge(m.limit))
	}
	m.unread = m.prefix[:]
	return nil
}

// torn is an end that is none: it came within a message.
func torn(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// within reads with patience. Where the connection knows no deadlines nobody is
// waited for with patience.
func (m *messages) within(buf []byte) (int, error) {
	n, err := m.patient.Read(buf)
	return n, m.failure(err)
}

// failure returns why a read failed as what the library passes on: also one without
// patience, which was interrupted.
func (m *messages) failure(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return Failure(body.Stalled(m.patience))
	}
	return coded(err)
}
