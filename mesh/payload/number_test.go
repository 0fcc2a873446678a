package payload_test

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/payload"
)

func TestLargeNumberIsFound(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`[1e308, -1.7976931348623157E+308, 1e-400, "1e400", "\"1e400", true, 0.5]`: "",
		`{"1e400": [1, 1e400, 2e400]}`:                                             "1e400",
		`-2.5E+999`:                                                                "-2.5E+999",
		`1` + strings.Repeat("0", 400):                                             "1" + strings.Repeat("0", 400),
		`0.` + strings.Repeat("0", 400) + `e9`:                                     "",
		`"1e400`:                                                                   "", // not JSON, which others report
		`"\`:                                                                       "",
		``:                                                                         "",
	} {
		at, found := payload.LargeNumber([]byte(text))
		if got := string(found); got != want || want != "" && !strings.HasPrefix(text[at:], want) {
			t.Errorf("%.40q: got %q at %d, want %q", text, got, at, want)
		}
	}
}
