package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// meshContext is how to reach the gateways of a mesh. Paths are absolute.
type meshContext struct {
	Address   string `json:"address,omitempty"`
	Admin     string `json:"admin,omitempty"`
	TokenFile string `json:"token_file,omitempty"`
	// AdminTokenFile is for the admin port, instead of TokenFile.
	AdminTokenFile string `json:"admin_token_file,omitempty"`
	CAFile         string `json:"ca_file,omitempty"`
}

// contexts are the contexts of a user; Current is empty where none is in use.
type contexts struct {
	Current  string                 `json:"current,omitempty"`
	Contexts map[string]meshContext `json:"contexts"`
}

// contextsFile returns the path of a user's contexts.
func contextsFile() (string, error) {
	folder, err := os.UserConfigDir()
	return filepath.Join(folder, "stagemesh", "contexts.json"), err
}

// readContexts returns the contexts of the user; one without a home, such as a service's, has none.
func readContexts() (out contexts, err error) {
	path, err := contextsFile()
	if err != nil {
		return out, nil //nolint:nilerr // it has no home
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w; correct or remove the file", path, err)
	}
	return out, nil
}

func (c contexts) names() []string { return slices.Sorted(maps.Keys(c.Contexts)) }

// find returns a context.
func (c contexts) find(name string) (meshContext, error) {
	out, ok := c.Contexts[name]
	if !ok {
		return out, fmt.Errorf("there is no context %q; there is %s; stagemesh context add makes one", name, cmp.Or(strings.Join(c.names(), ", "), "none"))
	}
	return out, nil
}

// changeContexts writes the contexts after a change, in a new file for this user alone. Changes take
// turns, and a reader sees all of one or nothing.
func changeContexts(change func(*contexts) error) error {
	path, err := contextsFile()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = folder.Close() }() // which unlocks it
	if err := unix.Flock(int(folder.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("%s: lock: %w", folder.Name(), err)
	}
	all, err := readContexts()
	if err != nil {
		return err
	}
	if err := change(&all); err != nil {
		return err
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	next := path + ".new"
	if err := os.WriteFile(next, append(text, '\n'), 0o600); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	return os.Rename(next, path)
}

func newContext() *cobra.Command {
	return group("context", "Add, list, use or remove the addresses and tokens of meshes",
		"Add, list, use or remove contexts: names for the addresses and credentials of a mesh, in stagemesh/contexts.json of your\n"+
			"configuration folder. Commands that ask a running mesh take the context in use, or that of --context. A flag overrides its\n"+
			"variable, such as STAGEMESH_ADDRESS for --address, and the variable the context. The credentials of a context are sent to\n"+
			"its own addresses alone.",
		newContextAdd(), newContextList(),
		newContextChange("use [NAME]", "Use a context from now on, or none without a NAME", 0, func(all *contexts, name string) { all.Current = name }),
		newContextChange("remove NAME", "Remove a context", 1, func(all *contexts, name string) {
			delete(all.Contexts, name)
			if all.Current == name {
				all.Current = ""
			}
		}))
}

// newContextChange returns a command that changes an existing context.
func newContextChange(use, short string, least int, change func(all *contexts, name string)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: between(least, 1, "give one NAME"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			all, _ := readContexts()
			return all.names(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(_ *cobra.Command, args []string) error {
			return changeContexts(func(all *contexts) error {
				name := strings.Join(args, "")
				if len(args) > 0 {
					if _, err := all.find(name); err != nil {
						return err
					}
				}
				change(all, name)
				return nil
			})
		},
	}
}

func newContextAdd() *cobra.Command {
	var c meshContext
	add := &cobra.Command{
		Use: "add NAME", Short: "Add a context, or replace the one of that name",
		Example: "  stagemesh context add prod --address https://mesh:8080 --admin https://mesh:9080 --token-file token --ca-file ca.pem\n  stagemesh context use prod",
		Args:    between(1, 1, "give one NAME"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if err := pipeline.ValidName("context", args[0]); err != nil {
				return err
			}
			if c.Address == "" && c.Admin == "" {
				return usageError(cmd, errors.New("give --address, --admin or both"))
			}
			for flag, address := range map[string]string{publicFlag: c.Address, adminFlag: c.Admin} {
				p := port{flag: flag, standard: "https://mesh:8080", address: cmp.Or(address, "https://mesh")}
				if _, err := p.url(); err != nil {
					return err
				}
			}
			for _, path := range []*string{&c.TokenFile, &c.AdminTokenFile, &c.CAFile} {
				if *path != "" {
					*path, err = filepath.Abs(*path)
				}
				if err != nil {
					return err
				}
			}
			return changeContexts(func(all *contexts) error {
				if all.Contexts == nil {
					all.Contexts = map[string]meshContext{}
				}
				all.Contexts[args[0]] = c
				return nil
			})
		},
	}
	flags := add.Flags()
	flags.StringVar(&c.Address, publicFlag, "", "the gateway's address")
	flags.StringVar(&c.Admin, adminFlag, "", "the address of a gateway's admin port")
	flags.StringVar(&c.TokenFile, tokenFlag, "", "a file with a token")
	flags.StringVar(&c.AdminTokenFile, "admin-token-file", "", "a file with a token of the admin port, if that wants another")
	flags.StringVar(&c.CAFile, caFlag, "", "a file with the certificates, in PEM, that vouch for the ports; the system's own if empty")
	return add
}

func newContextList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the contexts; * marks the one in use",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := readContexts()
			if err != nil {
				return err
			}
			var rows [][]string
			for _, name := range all.names() {
				c := all.Contexts[name]
				row := []string{name, redact(c.Address), redact(c.Admin), c.TokenFile, c.AdminTokenFile, c.CAFile}
				mark := map[bool]string{true: "*"}[name == all.Current]
				rows = append(rows, append([]string{mark}, texts(row, func(s string) string { return cmp.Or(visible(s), "-") })...))
			}
			return printTable(cmd.OutOrStdout(), "\tNAME\tADDRESS\tADMIN\tTOKEN FILE\tADMIN TOKEN FILE\tCA FILE", rows)
		},
	}
}
