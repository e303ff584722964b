from schedbench.cli.app import main

main()
