import { defineConfig } from "vitest/config"

export default defineConfig({
  test: {
    globalSetup: ["test/support/globalSetup.ts"],
    include: ["test/**/*.test.ts"],
    // Tests start databases and processes of their own: more workers would only make each other late.
    pool: "forks",
    maxWorkers: 2,
    // Leases of one second on a real server, with processes that are killed, meet a noisy machine now and then.
    retry: 1,
    testTimeout: 60_000,
    hookTimeout: 60_000
  }
})
