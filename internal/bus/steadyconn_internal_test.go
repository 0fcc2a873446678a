package bus

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

func TestWritesLastAsLongAsTheyMove(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer near.Close()
		defer far.Close()
		const parts = 8 // in 20 s, less than maxWrite
		go func() {
			for range parts {
				<-time.After(writeTimeout / 2)
				_, _ = io.ReadFull(far, make([]byte, steadyBytes))
			}
		}()
		c, begin := &steadyConn{Conn: near}, time.Now()
		for n, want := range []error{nil, os.ErrDeadlineExceeded} { // nobody reads the second message
			_ = c.SetWriteDeadline(time.Now().Add(writeTimeout))
			written, err := c.Write(make([]byte, parts*steadyBytes))
			if !errors.Is(err, want) || want == nil && written != parts*steadyBytes {
				t.Errorf("message %d: %d bytes written, %v", n, written, err)
			}
		}
		if took := time.Since(begin); took > parts*writeTimeout/2+writeTimeout {
			t.Errorf("they took %s", took)
		}
	})
}
