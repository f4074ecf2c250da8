from kernels.cpu.build import main

main()
