package config_test

import (
	"math"
	"testing"

	"github.com/stagemesh/stagemesh/internal/config"
)

func TestSizesAreRead(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]config.Bytes{
		"0": 0, "512": 512, "512B": 512, "1KiB": 1 << 10, "4MiB": 4 << 20, "4 MiB": 4 << 20, " 2GiB ": 2 << 30, "1TiB": 1 << 40,
		"10kB": 10_000, "10KB": 10_000, "1.5MB": 1_500_000, "1.5KiB": 1536, "0.57kB": 570, ".5KiB": 512, "1.kB": 1000, "1TB": 1e12, "3GB": 3e9,
		"9223372036854775807": math.MaxInt64, "9007199254740993": 1<<53 + 1,
	} {
		if got, err := config.ParseBytes(text); err != nil || got != want {
			t.Errorf("%q: got %d, %v, want %d", text, got, err, want)
		}
	}
}

func TestInvalidSizesAreRejected(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", "x", "KiB", "-1", "+1", "1.5", "0.3KiB", "1e3", "0x10", "1_000", "1/2", "Inf", "NaN", "1 2", "1MiBB", "4mib", "..", ".", "1.2.3",
		"9223372036854775808", "9000000TiB", "00000000000000000000000000000000000000001",
	} {
		if got, err := config.ParseBytes(text); err == nil || got != 0 {
			t.Errorf("%q is %d", text, got)
		}
	}
}

func TestSizesPrintAsTheyAreWritten(t *testing.T) {
	t.Parallel()
	for size, want := range map[config.Bytes]string{
		0: "0", 1: "1", 1023: "1023", 1024: "1KiB", 1536: "1536", 4 << 20: "4MiB", 3 << 30: "3GiB", 1 << 50: "1024TiB", 1000: "1000", -1: "-1",
	} {
		if got := size.String(); got != want {
			t.Errorf("%d: got %s, want %s", int64(size), got, want)
		}
	}
}

func FuzzParseBytes(f *testing.F) {
	for _, seed := range []string{"512", "4MiB", "1.5KiB", "0.57kB", "9223372036854775807", "-1", "1e9", " 1 B"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		size, err := config.ParseBytes(text)
		if err != nil {
			return
		}
		if size < 0 {
			t.Fatalf("%q is %d", text, size)
		}
		if again, err := config.ParseBytes(size.String()); err != nil || again != size {
			t.Fatalf("%q is %s, which is %d, %v", text, size, again, err)
		}
	})
}
