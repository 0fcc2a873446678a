package config

import (
	"cmp"
	"fmt"
	"math"
	"math/big"
	"net"
	"strconv"
	"strings"
)

// Bytes is a size in bytes. It prints as "4MiB", "10MB" or "512".
type Bytes int64

var units = []struct {
	suffix string
	size   int64
}{
	{"TiB", 1 << 40},
	{"GiB", 1 << 30},
	{"MiB", 1 << 20},
	{"KiB", 1 << 10},
	{"TB", 1e12},
	{"GB", 1e9},
	{"MB", 1e6},
	{"kB", 1e3},
	{"KB", 1e3},
	{"B", 1},
}

// binaryUnits are as many of the units.
const binaryUnits = 4

// ParseBytes reads a size: a whole number of bytes, or a decimal number with a
// unit that comes to one, such as 1.5KiB.
func ParseBytes(s string) (Bytes, error) {
	digits, scale := strings.TrimSpace(s), int64(1)
	for _, unit := range units {
		if before, ok := strings.CutSuffix(digits, unit.suffix); ok {
			digits, scale = strings.TrimSpace(before), unit.size
			break
		}
	}
	if n, ok := multiply(digits, scale); ok {
		return n, nil
	}
	return 0, fmt.Errorf("%s is not a size: use a number of bytes, or one with KiB, MiB, GiB, kB, MB or GB", quote(s))
}

// maxDigits bounds a size's digits, before and after the point.
const maxDigits = 32

// multiply returns digits times scale where that is a whole number.
func multiply(digits string, scale int64) (Bytes, bool) {
	if len(digits) > maxDigits || strings.Trim(digits, "0123456789.") != "" {
		return 0, false
	}
	n, ok := new(big.Rat).SetString(digits)
	if !ok {
		return 0, false
	}
	n.Mul(n, new(big.Rat).SetInt64(scale))
	return Bytes(n.Num().Int64()), n.IsInt() && n.Num().IsInt64()
}

// String returns the size in the largest binary unit that divides it.
func (b Bytes) String() string {
	for _, unit := range units[:binaryUnits] {
		if size := Bytes(unit.size); b >= size && b%size == 0 {
			return strconv.FormatInt(int64(b/size), 10) + unit.suffix
		}
	}
	return strconv.FormatInt(int64(b), 10)
}

// Address checks the address to listen on of the key; an empty address is valid.
func Address(key, addr string) error {
	if addr == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(addr)
	if err == nil && port != "" {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil || port == "" {
		return fmt.Errorf("%s: %q is not an address such as 127.0.0.1:8080, or :8080 for all of this machine's", key, addr)
	}
	return nil
}

// NotNegative checks the number of the key, which is finite.
func NotNegative[N cmp.Ordered](key string, n N) error {
	var zero N
	f, isFloat := any(n).(float64)
	switch {
	case n < zero:
		return fmt.Errorf("%s: %v is negative", key, n)
	case isFloat && (math.IsNaN(f) || math.IsInf(f, 1)):
		return fmt.Errorf("%s: %v is not a finite number", key, n)
	}
	return nil
}
