import { defineConfig } from "vite";
import react from "@vitejs/plugin-react";

const master = process.env.PACELINE_MASTER ?? "http://127.0.0.1:8080";
const token = process.env.PACELINE_TOKEN;

export default defineConfig({
  plugins: [react()],
  build: {
    outDir: "../src/paceline/_cluster/master/webui",
    emptyOutDir: true,
    target: "es2022",
    manifest: true,
    license: { fileName: "licenses.md" },
    chunkSizeWarningLimit: 700,
  },
  server: {
    proxy: {
      "/api": {
        target: master,
        changeOrigin: true,
        configure: (proxy) => {
          proxy.on("proxyReq", (request) => {
            // The master refuses other origins, and the development server is one.
            request.removeHeader("origin");
            if (token) request.setHeader("authorization", `Bearer ${token}`);
          });
        },
      },
    },
  },
  test: {
    environment: "jsdom",
    include: ["tests/**/*.test.{ts,tsx}"],
    setupFiles: "tests/setup.ts",
  },
} as Parameters<typeof defineConfig>[0]);
