// Package webhook says which URLs a mesh calls as webhooks, and signs the calls as Standard
// Webhooks 1.0 has it.
//
//	err := config.Check(url)            // at the submit, and before each try
//	transport.DialContext = config.Dial // refuses private addresses
//	err = config.Sign(header, tenant, id, time.Now(), body)
//
// A name may resolve to another address at each try, so only Dial is the barrier; Check tells
// submitters early. Everything here is safe for concurrent use. Tests allow 127.0.0.1.
package webhook

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
)

// Config is the section jobs.webhooks of a mesh file.
type Config struct {
	Secrets

	// Tenants have secrets of their own, instead of the others'. Calls of other tenants are also
	// signed with a secret that is derived for the tenant: who knows the others' secret can forge a
	// call to all that verify with it.
	Tenants map[string]Secrets `yaml:"tenants"`
	// Allow has host names, addresses and networks that may be private and without TLS. A
	// network lifts the bar from the addresses that a name resolves to, but not https.
	Allow []string `yaml:"allow"`
	// MaxInFlight bounds the calls that run; 0 means the default of a pool.
	MaxInFlight int `yaml:"max_in_flight"`
	// Resolver looks up host names; nil is the system's.
	Resolver *net.Resolver `yaml:"-"`
}

// Secrets are what webhooks are signed with.
type Secrets struct {
	// SecretFiles hold one secret each: whsec_ and the base64 of 24 to 64 bytes. Two are for a
	// change of the secret: receivers may verify with either. They are read for each call.
	SecretFiles []string `yaml:"secret_files,path"`
}

const (
	maxSecretFiles       = 2
	minSecret, maxSecret = 24, 64
	derivedSecret        = 32
	secretPrefix         = "whsec_"
	maxURL               = 2048
	connectTimeout       = 5 * time.Second
)

// ErrPrivate means that a webhook's host has an address of a private network.
var ErrPrivate = errors.New("its host has an address that is not public; jobs.webhooks.allow may list it")

// Validate checks the section; messages begin with the key in it.
func (c Config) Validate() error {
	errs := []error{c.Secrets.validate(), config.NotNegative("max_in_flight", c.MaxInFlight)}
	for _, tenant := range slices.Sorted(maps.Keys(c.Tenants)) {
		errs = append(errs, config.InSection("tenants."+tenant, c.Tenants[tenant].validate()))
	}
	for i, allowed := range c.Allow {
		_, isNetwork := network(allowed)
		if !isNetwork && (allowed == "" || strings.ContainsAny(allowed, "/: ")) {
			errs = append(errs, fmt.Errorf("allow[%d]: %q is not a host name, address or network such as 10.0.0.0/8", i, allowed))
		}
	}
	return errors.Join(errs...)
}

func (s Secrets) validate() error {
	if n := len(s.SecretFiles); n == 0 || n > maxSecretFiles {
		return fmt.Errorf("secret_files: %d; name one file, or two while the secret changes", n)
	}
	return nil
}

// Check returns why a URL is not called, or nil.
func (c Config) Check(raw string) error {
	u, err := url.Parse(raw)
	switch {
	case err != nil, u.Host == "", u.User != nil, u.Fragment != "", len(raw) > maxURL:
		return fmt.Errorf("must be a URL such as https://host/path of at most %d bytes, without user and fragment", maxURL)
	}
	address, err := netip.ParseAddr(u.Hostname())
	isPrivate := err == nil && !isPublic(address) || isLocalhost(u.Hostname())
	switch isAllowed := c.allowsHost(u.Hostname()) || err == nil && c.allows(address); {
	case u.Scheme != "https" && (u.Scheme != "http" || !isAllowed):
		return errors.New("is not https://")
	case isPrivate && !isAllowed:
		return ErrPrivate
	}
	return nil
}

// isLocalhost reports whether a host name is one of this machine, by RFC 6761.
func isLocalhost(host string) bool {
	return strings.HasSuffix("."+strings.ToLower(strings.TrimSuffix(host, ".")), ".localhost")
}

// Dial connects to an address, host and port. It returns ErrPrivate instead of connecting to an
// address that is not public, unless that or the host is allowed.
func (c Config) Dial(ctx context.Context, via, address string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: connectTimeout, Resolver: c.Resolver}
	if host, _, err := net.SplitHostPort(address); err != nil || !c.allowsHost(host) {
		dialer.Control = func(_, address string, _ syscall.RawConn) error {
			at, err := netip.ParseAddrPort(address)
			if err != nil || !isPublic(at.Addr()) && !c.allows(at.Addr()) {
				return ErrPrivate
			}
			return nil
		}
	}
	return dialer.DialContext(ctx, via, address)
}

func (c Config) allowsHost(host string) bool {
	return slices.ContainsFunc(c.Allow, func(allowed string) bool { return strings.EqualFold(allowed, strings.TrimSuffix(host, ".")) })
}

func (c Config) allows(address netip.Addr) bool {
	return slices.ContainsFunc(c.Allow, func(allowed string) bool {
		p, ok := network(allowed)
		return ok && p.Contains(plain(address))
	})
}

// network reads a network, or an address as the network of that alone.
func network(s string) (netip.Prefix, bool) {
	if address, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(plain(address), plain(address).BitLen()), true
	}
	p, err := netip.ParsePrefix(s)
	return p.Masked(), err == nil
}

// plain returns an IPv4 address as such if IPv6 wraps it, without a zone.
func plain(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// reserved are the networks that are not public by the registries of IANA and that netip does not
// know as such; of IPv6 only those in global, where some translate to IPv4 addresses.
var (
	global   = netip.MustParsePrefix("2000::/3")
	reserved = prefixes("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)

func prefixes(all ...string) (out []netip.Prefix) {
	for _, s := range all {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func isPublic(a netip.Addr) bool {
	a = plain(a)
	return a.IsGlobalUnicast() && !a.IsPrivate() && (a.Is4() || global.Contains(a)) && !slices.ContainsFunc(reserved, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Sign sets the headers of a call of a tenant's webhook. The ID names the message, the same
// at each try.
func (c Config) Sign(h http.Header, tenant, id string, at time.Time, body []byte) error {
	secrets, ok := c.Tenants[tenant]
	if !ok {
		secrets = c.Secrets
	}
	keys, err := secrets.read()
	if err != nil {
		return err
	}
	if !ok {
		for _, key := range slices.Clone(keys) {
			keys = append(keys, derive(key, tenant))
		}
	}
	stamp := strconv.FormatInt(at.Unix(), 10)
	var signatures []string
	for _, key := range keys {
		mac := hmac.New(sha256.New, key)
		fmt.Fprintf(mac, "%s.%s.%s", id, stamp, body)
		signatures = append(signatures, "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	}
	h.Set("webhook-id", id)
	h.Set("webhook-timestamp", stamp)
	h.Set("webhook-signature", strings.Join(signatures, " "))
	return nil
}

// ReadSecrets reads all secrets, to report a bad file early.
func (c Config) ReadSecrets() error {
	for _, tenant := range append(slices.Sorted(maps.Keys(c.Tenants)), "") {
		if err := c.Sign(http.Header{}, tenant, "", time.Time{}, nil); err != nil {
			return fmt.Errorf("secret_files: %w", err)
		}
	}
	return nil
}

// DerivedSecrets returns the secrets that are derived for a tenant without any of its own, one for
// each file, as receivers take them.
func (c Config) DerivedSecrets(tenant string) (out []string, err error) {
	if _, ok := c.Tenants[tenant]; ok {
		return nil, fmt.Errorf("tenant %s has secrets of its own, in tenants.%[1]s.secret_files", tenant)
	}
	keys, err := c.Secrets.read()
	for _, key := range keys {
		out = append(out, secretPrefix+base64.StdEncoding.EncodeToString(derive(key, tenant)))
	}
	return out, err
}

// derive returns the key of a tenant.
func derive(key []byte, tenant string) []byte {
	out, _ := hkdf.Key(sha256.New, key, nil, "stagemesh webhook "+tenant, derivedSecret) // it fails only for more bytes
	return out
}

// read returns the keys in the files.
func (s Secrets) read() (keys [][]byte, err error) {
	for _, path := range s.SecretFiles {
		key, err := readSecret(path)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

func readSecret(path string) ([]byte, error) {
	text, err := credentials.Token(path)
	if err != nil {
		return nil, err
	}
	encoded, isOne := strings.CutPrefix(text, secretPrefix)
	key, err := base64.StdEncoding.DecodeString(encoded)
	if !isOne || err != nil || len(key) < minSecret || len(key) > maxSecret {
		return nil, fmt.Errorf("%s: a secret is %s and the base64 of %d to %d bytes", path, secretPrefix, minSecret, maxSecret)
	}
	return key, nil
}
