package port

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/credentials"
)

// Tokens are what callers may know; any of them will do, so that one can replace
// another while both are taken. The zero Tokens are none. They are kept as digests,
// so that nothing can print them and all comparisons take the same time.
type Tokens struct{ digests [][sha256.Size]byte }

// NewTokens returns the tokens of a text, one a line; white space around them, and
// empty lines, do not count. There is at least one, and each is visible ASCII.
func NewTokens(text string) (Tokens, error) {
	var out Tokens
	for line := range strings.Lines(text) {
		token := strings.TrimSpace(line)
		if token == "" {
			continue
		}
		if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return Tokens{}, errors.New("a token is one word of visible ASCII")
		}
		out.digests = append(out.digests, sha256.Sum256([]byte(token)))
	}
	if len(out.digests) == 0 {
		return Tokens{}, errors.New("there is no token in it")
	}
	return out, nil
}

// ReadTokens reads tokens from a file, one a line.
func ReadTokens(path string) (Tokens, error) {
	data, err := credentials.Read(path)
	if err != nil {
		return Tokens{}, err
	}
	tokens, err := NewTokens(string(data))
	if err != nil {
		return Tokens{}, fmt.Errorf("%s: %w", path, err)
	}
	return tokens, nil
}

// none reports whether callers need not know any.
func (t Tokens) none() bool { return len(t.digests) == 0 }

// has reports whether the text is one of the tokens. All are compared, so that the
// time tells nothing about which.
func (t Tokens) has(text string) bool {
	digest := sha256.Sum256([]byte(text))
	found := 0
	for i := range t.digests {
		found |= subtle.ConstantTimeCompare(digest[:], t.digests[i][:])
	}
	return found == 1
}
