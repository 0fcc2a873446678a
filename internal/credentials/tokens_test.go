package credentials_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestTokensAreReadFromAFileOneALine(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for name, test := range map[string]struct{ text, want string }{
		"good":      {"  open-sesame\n", ""},
		"several":   {"\nopen-sesame\n\n  open-simsim  \r\n", ""},
		"empty":     {" \n", "there is no token in it"},
		"a tenant":  {"open-sesame treasure\nopen-simsim\ttreasure\n", ""},
		"two words": {"open-sesame\nopen Sesame-Secret", "the name of its tenant"},
		"three":     {"open sesame secret", "the name of its tenant"},
		"long name": {"open " + strings.Repeat("a", 64), "the name of its tenant"},
		"two names": {"open sesame\nopen secret", "there twice"},
		"foreign":   {"s\u00e9same", "one word of visible ASCII"},
		"large":     {strings.Repeat("x", 2<<20), "larger than 1048576 bytes"},
	} {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := credentials.ReadTokens(path, nil)
		if (err == nil) != (test.want == "") || err != nil && (!strings.Contains(err.Error(), test.want) || !strings.HasPrefix(err.Error(), path) || strings.Contains(strings.TrimPrefix(err.Error(), path), "ecret")) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if _, err := credentials.ReadTokens(filepath.Join(folder, "nowhere"), nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestRolesAreOfOperatorsAlone(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"all\nlook role=read\nshow team role=read\n": "",
		"secret role=write":                          "role=read is the only one",
		"secret role=read team":                      "the name of its tenant",
		"secret role=read\nsecret":                   "there twice",
	} {
		_, err := credentials.NewOperatorTokens(text)
		if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%q: got %v", text, err)
		}
	}
	text := "all\nlook role=read\nshow team role=read\nother team\n"
	path := testbed.SecretFile(t, text)
	tokens, err := credentials.ReadOperatorTokens(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for token, want := range map[string]credentials.Holder{"all": {}, "look": {IsReader: true}, "show": {Tenant: "team", IsReader: true}, "other": {Tenant: "team"}} {
		if got, ok := tokens.Holder(token); !ok || got != want {
			t.Errorf("%s is held by %+v, %t", token, got, ok)
		}
	}
	if _, err := credentials.ReadTokens(path, nil); err == nil || !strings.Contains(err.Error(), "gateway.admin.token_file") {
		t.Errorf("another port takes roles: %v", err)
	}
}

func TestTokensCannotBePrinted(t *testing.T) {
	t.Parallel()
	tokens, err := credentials.NewTokens("open-sesame")
	if err != nil {
		t.Fatal(err)
	}
	if text := fmt.Sprintf("%v %+v %#v %s", tokens, tokens, tokens, tokens); strings.Contains(text, "sesame") {
		t.Error(text)
	}
}

func TestWrongTokensAreDelayedUpToABound(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tokens, err := credentials.NewTokens("open-sesame")
		if err != nil {
			t.Fatal(err)
		}
		took := func(ctx context.Context, tokens credentials.Tokens, authorization string) time.Duration {
			begin := time.Now()
			tokens.DelayRefusal(ctx, authorization)
			return time.Since(begin)
		}
		const many = 200
		delayed := make(chan time.Duration, many)
		for range many {
			go func() { delayed <- took(t.Context(), tokens, "Bearer sesame") }()
		}
		counts := map[time.Duration]int{}
		for range many {
			counts[<-delayed]++
		}
		if counts[500*time.Millisecond] != 64 || counts[0] != many-64 {
			t.Errorf("they took %v", counts)
		}
		if got := took(t.Context(), tokens, "Bearer sesame"); got != 500*time.Millisecond {
			t.Errorf("a later one took %s", got)
		}
		if got := took(t.Context(), tokens, ""); got != 0 {
			t.Errorf("no token took %s", got)
		}
		left, leave := context.WithCancel(t.Context())
		leave()
		if got := took(left, tokens, "Bearer sesame"); got != 0 {
			t.Errorf("a caller who has left took %s", got)
		}
		if got := took(t.Context(), credentials.Tokens{}, "Bearer sesame"); got != 0 {
			t.Errorf("a port without tokens took %s", got)
		}
	})
}
