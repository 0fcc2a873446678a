package port_test

import (
	"bytes"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/gateway/front/port"
)

func TestFailedHandshakesAreLoggedAtDebug(t *testing.T) {
	t.Parallel()
	for level, want := range map[slog.Level]bool{slog.LevelInfo: false, slog.LevelDebug: true} {
		var log bytes.Buffer
		s := port.NewServer(http.NotFoundHandler(), slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: level})))
		s.ErrorLog.Print("http: TLS handshake error from 127.0.0.1:1: EOF")
		if got := strings.Contains(log.String(), "level=DEBUG"); got != want || !want && log.Len() > 0 {
			t.Errorf("%s: it logs %q", level, log.String())
		}
		s.ErrorLog.Print("http: Accept error")
		if !strings.Contains(log.String(), "level=WARN") {
			t.Errorf("%s: it logs %q", level, log.String())
		}
	}
}
