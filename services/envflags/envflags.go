// Package envflags has the environment say what the flags of a program do, as
// containers like it: STAGEMESH_LOG_LEVEL for --log-level. A flag that is given goes
// before its variable.
//
//	command.RunE = envflags.RunE(command.RunE)
package envflags

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Help is what a program's help says of it.
const Help = "Each flag may be a variable of the environment instead, such as STAGEMESH_LOG_LEVEL for --log-level; flags go before them."

// Variable returns the name of a flag's variable.
func Variable(flag string) string {
	return "STAGEMESH_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// RunE returns a function that runs the command with the flags that the environment
// gives. Its errors about such a flag, which begin with it, name the variable.
func RunE(run func(*cobra.Command, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		given, err := apply(cmd.Flags())
		if err != nil {
			return err
		}
		return explain(run(cmd, args), given)
	}
}

// apply sets the flags that were not given and have a variable, and returns them. An
// empty variable is none.
func apply(flags *pflag.FlagSet) (given []string, err error) {
	flags.VisitAll(func(f *pflag.Flag) {
		value := os.Getenv(Variable(f.Name))
		if err != nil || value == "" || f.Changed || f.Name == "help" || f.Name == "version" {
			return
		}
		given = append(given, f.Name)
		err = explain(flags.Set(f.Name, value), given)
	})
	return given, err
}

// explain says where a flag comes from that an error is about.
func explain(err error, given []string) error {
	if err == nil {
		return nil
	}
	for _, name := range given {
		text := err.Error()
		if strings.HasPrefix(text, "--"+name+":") || strings.Contains(text, `"--`+name+`" flag`) {
			return fmt.Errorf("%w (%s gives it)", err, Variable(name))
		}
	}
	return err
}
