package credentials

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// BearerToken returns the token of an Authorization header.
func BearerToken(authorization string) (token string, ok bool) {
	scheme, token, ok := strings.Cut(authorization, " ")
	return strings.TrimSpace(token), ok && strings.EqualFold(scheme, "Bearer")
}

// Tokens are the tokens of a port; any of them is accepted, so one can replace another. The zero
// Tokens have none. They are stored as digests, so nothing can print them and all comparisons
// take the same time.
type Tokens struct {
	digests [][sha256.Size]byte
	// holders has who holds the tokens of the digests.
	holders []Holder
	// delayed are the refusals that wait.
	delayed chan struct{}
	// file is where they are read again; nil where they have none.
	file *reloaded[Tokens]
}

// Holder is who holds a token.
type Holder struct {
	// Tenant is "" where the token has none.
	Tenant string
	// IsReader is true where the token has the role read: it may look and change nothing.
	IsReader bool
}

// readRole is the word of a line that gives its token the role read.
const readRole = "role=read"

// A wrong token is refused after refusalDelay, so that guessing is slow. Valid tokens never wait:
// one address may be the proxy of all callers. More than maxDelayed wrong ones at a time are
// refused at once, as each of them takes memory while it waits.
const (
	refusalDelay = 500 * time.Millisecond
	maxDelayed   = 64
)

// NewTokens returns the tokens of a text, one per line, without white space around them and
// empty lines. There is at least one, and each is visible ASCII. After a token may stand the
// name of its tenant, which several tokens may share.
func NewTokens(text string) (Tokens, error) { return newTokens(text, false) }

// NewOperatorTokens is NewTokens for a port of operators: a line may end with role=read.
func NewOperatorTokens(text string) (Tokens, error) { return newTokens(text, true) }

func newTokens(text string, hasRoles bool) (Tokens, error) {
	out := Tokens{delayed: make(chan struct{}, maxDelayed)}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if strings.ContainsFunc(words[0], func(r rune) bool { return r <= ' ' || r > '~' }) {
			return Tokens{}, errors.New("a token is one word of visible ASCII")
		}
		if strings.HasPrefix(words[0], "role=") {
			return Tokens{}, errors.New("a line begins with a role; it is the last word of the line of its token")
		}
		var holder Holder
		if last := len(words) - 1; last > 0 && strings.HasPrefix(words[last], "role=") {
			switch {
			case !hasRoles:
				return Tokens{}, errors.New("a token has a role, which only those of gateway.admin.token_file may have")
			case words[last] != readRole:
				return Tokens{}, errors.New("a token has an unknown role; " + readRole + " is the only one, and without it a token may do all")
			}
			words, holder.IsReader = words[:last], true
		}
		holder.Tenant = strings.Join(words[1:], " ")
		if len(words) > 1 && pipeline.ValidName("tenant", holder.Tenant) != nil {
			// The error does not show it: it may be the token.
			return Tokens{}, errors.New("a line is a token and, after a space, the name of its tenant: up to 63 of a-z, 0-9 and -")
		}
		digest := sha256.Sum256([]byte(words[0]))
		if at := slices.Index(out.digests, digest); at >= 0 && out.holders[at] != holder {
			return Tokens{}, errors.New("a token is there twice, with two tenants or roles")
		}
		out.digests, out.holders = append(out.digests, digest), append(out.holders, holder)
	}
	if len(out.digests) == 0 {
		return Tokens{}, errors.New("there is no token in it")
	}
	return out, nil
}

// ReadTokens reads tokens from a file, one per line. They are read again when the file changes,
// which is logged.
func ReadTokens(path string, log *slog.Logger) (Tokens, error) {
	return readTokens(path, log, NewTokens)
}

// ReadOperatorTokens is ReadTokens for a port of operators, as NewOperatorTokens.
func ReadOperatorTokens(path string, log *slog.Logger) (Tokens, error) {
	return readTokens(path, log, NewOperatorTokens)
}

func readTokens(path string, log *slog.Logger, parse func(string) (Tokens, error)) (Tokens, error) {
	file, err := newReloaded(log, func() (Tokens, error) {
		data, err := Read(path)
		if err != nil {
			return Tokens{}, err
		}
		tokens, err := parse(string(data))
		if err != nil {
			return Tokens{}, fmt.Errorf("%s: %w", path, err)
		}
		return tokens, nil
	}, path)
	if err != nil {
		return Tokens{}, err
	}
	out := file.value
	out.file = file
	return out, nil
}

// String implements fmt.Stringer. It reveals nothing.
func (t Tokens) String() string { return "tokens" }

// IsEmpty reports whether there is no token.
func (t Tokens) IsEmpty() bool { return len(t.digests) == 0 }

// DelayRefusal waits before the refusal of a header of Authorization with a wrong token, until the
// context ends. Do not call it on a goroutine that others wait for, such as one that reads a
// connection of many calls.
func (t Tokens) DelayRefusal(ctx context.Context, authorization string) {
	if _, isSent := BearerToken(authorization); !isSent {
		return
	}
	select {
	case t.delayed <- struct{}{}:
	default:
		return
	}
	defer func() { <-t.delayed }()
	delay := time.NewTimer(refusalDelay)
	defer delay.Stop()
	select {
	case <-delay.C:
	case <-ctx.Done():
	}
}

// Holder returns who holds a token, and whether the text is one. It compares all, so its
// time does not reveal which.
func (t Tokens) Holder(text string) (holder Holder, ok bool) {
	if t.file != nil {
		t = t.file.get()
	}
	digest := sha256.Sum256([]byte(text))
	found := -1
	for i := range t.digests {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(digest[:], t.digests[i][:]), i, found)
	}
	if found < 0 {
		return Holder{}, false
	}
	return t.holders[found], true
}
