from schedbench.cli.app import console

console()
